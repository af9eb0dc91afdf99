"""The exported graphs against the runtime."""
