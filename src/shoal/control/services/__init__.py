"""Services: commands that make, scale and end them, and the loop that keeps their replicas as they should be.

A replica is a job like any other. What is decided about replicas is decided in `serving`, from plain values;
here it is recorded, and said to data planes as one table.
"""
