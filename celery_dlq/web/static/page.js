// live updates
