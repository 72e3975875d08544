"""Rows of the table of estimators, a file for each family."""
