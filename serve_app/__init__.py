"""The Ray Serve application around the engine."""
