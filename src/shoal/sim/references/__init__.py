"""Published policies, kept to show that the simulator is right: `make yardsticks` compares them with their
papers.

One idea a file. None of them is offered to users.
"""
