"""Start a rank without paying for its imports again: a zygote that has made them forks it.

`zygote`, `program`, `imports` and `stand_in` run inside the job with the job's own interpreter, copied there
by `install`: they import nothing but the standard library and each other. They only make a start faster:
whatever goes wrong here, the rank is started the ordinary way.
"""
