"""What only a GPU can show; skipped without one."""
