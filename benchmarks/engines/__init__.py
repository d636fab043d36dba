"""Real engines of other projects: installed, started and asked, for tests and comparisons."""
