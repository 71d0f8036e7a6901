"""Speed and memory of the gateway. `python -m bench --help` says how to run it; README.md has the figures."""
