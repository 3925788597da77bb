"""Federated learning when labels are scarce, clients are many, and some classes have no name yet."""

__version__ = "0.1.0"
