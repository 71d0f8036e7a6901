"""`python -m tests.sim --seed N --steps M [--count K]`: play seeds; a failure prints its seed and a short history."""

from __future__ import annotations

import argparse
import sys

from tests.sim.warm import play_warm
from tests.sim.world import Violation, play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=300, help="operations a seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, one after the other")
    parser.add_argument("--warm", action="store_true", help="on a real card session, with warm restarts")
    options = parser.parse_args()
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        try:
            report = (play_warm if options.warm else play)(seed, options.steps)
        except Violation as violation:
            failed += 1
            sys.stdout.write(f"{violation}\n")
        else:
            sys.stdout.write(f"{report}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
