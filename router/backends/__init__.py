"""Engine dialects: one file per engine, each a `Backend`."""
