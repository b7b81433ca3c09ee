"""Build, check, publish and pin the kernel; each module runs as `python -m tools.<name> --help`."""
