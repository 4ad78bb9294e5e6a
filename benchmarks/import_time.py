"""The time of `import linattn` beyond that of `import torch`: python benchmarks/import_time.py

Each is a new process; the two take turns, so that a slower machine for a while slows down both."""

import argparse
import statistics
import subprocess
import sys
import time


def seconds(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    statements = ["import torch", "import linattn"]
    # once before, for the files to be read from memory and compiled
    for statement in statements:
        seconds(statement)
    times = [[seconds(statement) for statement in statements] for _ in range(runs)]
    torch, ours = zip(*times, strict=True)
    for statement, column in zip(statements, (torch, ours), strict=True):
        print(f"{statement:15} {statistics.median(column):6.3f} s  (fastest {min(column):.3f}, of {runs})")
    print(f"{'difference':15} {statistics.median(ours) - statistics.median(torch):6.3f} s")


if __name__ == "__main__":
    main()
