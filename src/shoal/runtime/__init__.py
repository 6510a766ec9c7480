"""Inside a job: the supervisor of one attempt on one node, and what it needs to run ranks.

Lives on workers without the control plane's dependencies: it imports leaves, the standard library and
msgspec, and starts fast. It decides nothing about other attempts and never talks to an engine or a store.
"""
