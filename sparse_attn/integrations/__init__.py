"""Engines that use the ops. Each module imports its engine, and only when it is imported itself."""
