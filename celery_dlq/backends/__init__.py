"""The contracts of a backend (`base`) and their implementations, one folder each."""
