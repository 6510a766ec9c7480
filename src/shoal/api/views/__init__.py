"""Replies: model objects as JSON of a declared shape. Pure; permission was checked before.

schema     the TypedDicts that describe every reply
render     jobs, attempts, nodes and people as those shapes
services   services, releases, replicas and rollouts
cluster    health, drills, audit entries and the cluster as a whole
openapi    the published description, made from `schema` and the request bodies
"""
