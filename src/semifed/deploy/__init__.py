"""A federation over a real network: what its parties need, and the processes they start."""
