"""No table: only the permissions."""
