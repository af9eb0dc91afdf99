"""mxdraft: the build toolchain and host binding (docs/, DESIGN in README.md)."""

__version__ = "0.1.0"
