"""Building, loading and running of generated code."""
