"""Say when a waiting job will start, and which change of its request would start it sooner.

- `forecast` learns run times from ended runs. `order.stamps` uses its expectation, and scenarios use its
  quantiles.
- `scenarios` plays futures with a copy of the planner, one run-time quantile per future, and returns a span
  of start times per job.
- `calibration` widens a span to an interval with 90 % coverage, learned from starts that were predicted
  earlier.
- `outlook` joins spans and promises into the `Outlook` that the API shows.
- `changes` tries changed requests in a copy of the present, and `sooner` tries them in one likely future.

Promises never rest on these predictions. They rest on time limits alone.
"""
