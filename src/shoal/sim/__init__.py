"""Virtual time: read a trace, let somebody decide who starts, measure what the jobs got.

`traces/` reads logs, `loop` moves the clock and asks a decider, `measure` turns a schedule into numbers, and
`references/` holds published policies that show the loop to be right. They are no part of the product's
policies.
"""
