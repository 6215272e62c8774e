"""What the router costs: time to a decision, time added to a request, memory.

`python -m bench` measures all three on this machine; figures and reasons are in
docs/performance.md.
"""
