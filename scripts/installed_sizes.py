"""Prints the size of an installation: megabytes per distribution, the largest first.

python scripts/installed_sizes.py [--min-mb 1]
"""

from __future__ import annotations

import argparse
import sys
from importlib import metadata


def megabytes(dist: metadata.Distribution) -> float:
    """Return the size of a distribution's files, in MB."""
    total = 0
    for file in dist.files or ():
        path = dist.locate_file(file)
        try:
            total += path.stat().st_size  # pyright: ignore[reportAttributeAccessIssue]
        except OSError:
            continue  # listed and not there
    return total / 1e6


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--min-mb", type=float, default=1.0)
    args = parser.parse_args()
    sizes = {d.metadata["Name"]: megabytes(d) for d in metadata.distributions()}
    small = {name: mb for name, mb in sizes.items() if mb < args.min_mb}
    rows = sorted(sizes.items(), key=lambda item: -item[1])
    for name, mb in rows:
        if name not in small:
            sys.stdout.write(f"{mb:9.1f} MB  {name}\n")
    sys.stdout.write(f"{sum(small.values()):9.1f} MB  {len(small)} smaller ones\n")
    sys.stdout.write(f"{sum(sizes.values()):9.1f} MB  in all\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
