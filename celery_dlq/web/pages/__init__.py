"""The pages: each function takes a call and returns a response; none knows a framework."""
