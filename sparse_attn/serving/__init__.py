"""What an engine needs around the ops. The rules in here import no torch."""
