"""Say which waiting candidate is considered next.

- `stamps` computes the due time, score and expected run of each candidate when it arrives. The formulas are
  in `due`, and the expected run comes from `prediction.forecast`.
- `queue` keeps the candidates sorted in queue lanes (one queue, project and priority) and shape groups
  (candidates that need the same). The cycle asks for the first position of each lane.
- `project_tree` counts what each project holds against its quota, limit and borrow. It refuses starts and
  answers who may reclaim.
- `fair_share` turns decayed device-seconds into a project's standing, which orders lanes of equal priority.
"""
