"""The slow loop: which role each `auto` worker should have, by simulating the last minutes."""
