"""Training as a user does it: whole steps of whole models."""
