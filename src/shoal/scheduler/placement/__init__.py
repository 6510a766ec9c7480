"""Find nodes for a demand, now or at the earliest time.

- `feasibility` says whether the cluster, if empty, could hold a demand at all.
- `fit` ranks the nodes that hold one need now. It prefers the nodes where the placement costs typical
  requests least, which `packing` computes.
- `gang` chooses all nodes of a gang from that ranking, as close together or spread as the job asks. `power`
  does the same where racks have power caps.
- If a demand does not fit now, `earliest` computes from time limits when it will. `windows` excludes
  maintenance and reservations.
- `reservations` keeps the nodes of promised starts, and says which nodes another job may still use.
- `search` puts these together: the tasks with which one candidate would start now.
"""
