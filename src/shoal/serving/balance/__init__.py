"""Which replica gets a request.

`service.py` holds one service (`LiveService`): its replicas, caller accounts and waiting requests. When a
request is admitted, `LiveService.pick` asks `TrafficSplit` in `balancer.py` for the release, then the
service's `Balancer` for a replica. `balancer.py` also computes the `RoutingHints` of a request from its
affinity key and its prompt. If no replica has a free slot, the request waits in the service's fair queue
until `pump` binds it to one.

`replica.py` holds what this process knows of one replica (`LiveReplica`): its requests, failures and idle
connections. `hedge.py` sends a copy of a late request to a second replica; the first reply wins.
"""
