"""Engines that use the ops, or are observed. Each module imports its engine when it is imported itself, or later."""
