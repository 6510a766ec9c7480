"""Say why a candidate does not start: one dominant reason, a sentence, details and a hint.

- `explainer` is called once for each waiting candidate after a plan. It checks the reasons in order and keeps
  one answer for all candidates that need the same.
- `lost_task` is called for each lost task that no other node can take.
- `limits` explains dependencies, backoff, array limits and project ceilings.
- `impossible` explains requests that no set of nodes could ever hold. Submission calls it too.
- `obstacles` explains memory shortage, maintenance and reservation windows, and eviction limits.
- `text` formats numbers, amounts, names and times for all of them.
"""
