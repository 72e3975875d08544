"""Automatic machine learning."""
