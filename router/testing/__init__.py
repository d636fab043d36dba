"""Scripted fakes that ship with the code, so that the same contract suite runs on fake and real."""
