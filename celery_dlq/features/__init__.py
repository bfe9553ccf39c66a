"""Optional powers beside the core, a folder each."""
