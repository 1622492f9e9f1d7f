"""The simulator: the real scheduler in virtual time, with measured costs."""
