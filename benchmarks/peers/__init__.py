"""Other people's programs that results are compared with, each in an environment of its own."""
