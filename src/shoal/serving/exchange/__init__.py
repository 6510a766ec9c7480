"""One request of a caller, from its head to the end of its reply: a state machine with a literal table.

`exchange.py` is the request: what it holds, and one method for each event. `states.py` names the states and
the events. `table.py` says which function handles each event in each state. The functions are in five files:
`from_caller.py` (what the caller sends), `queueing.py` (the wait for a slot), `to_replica.py` (pick, connect,
send), `from_replica.py` (the reply, or the loss of the connection) and `ending.py` (all ways to end).

`request_body.py` holds the bytes for the replica, and `reply_relay.py` what is known of the reply.
`client.py` says what an exchange needs of the caller's connection.
"""
