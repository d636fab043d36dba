"""Small stand-ins that obey the real contracts: a tiny model folder, and a model that is all KV."""
