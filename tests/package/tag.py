"""Checks that a release's tag names the version that was built: `python tag.py v1.2.3 build/dist`. No tag, no check."""

import sys
from pathlib import Path


def main(tag: str, folder: Path) -> None:
    version = tag.removeprefix("v")
    wheels = [path.name for path in folder.glob("*.whl")]
    if tag and not any(name.startswith(f"linattn-{version}-") for name in wheels):
        sys.exit(f"the tag is {tag}, but built was {', '.join(wheels)}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
