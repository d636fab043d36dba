"""Which prompts' beginnings are likely to be in which worker's cache."""
