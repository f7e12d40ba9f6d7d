"""Decides what will run, where and how, before anything starts."""
