"""Which service a request means, which caller sent it, and what that caller may do.

`routes.py` is called first, with the bytes of a head. `ServiceRoutes` recalls a head that it has seen, else
matches it against `head_templates.py` (heads that differ only in values that pass through), else parses it
in full. The result is a `RoutedRequest`: the service, the caller and the head for the replica.
`request_policy.py` answers preflights of browsers and decides which requests may be repeated or hedged.
`accounts.py` identifies callers by the digest of their token, counts each caller's limits, and holds the
fair queue of requests that wait for a slot.
"""
