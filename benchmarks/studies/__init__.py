"""Long studies of hooks, strategies and published results, with their results beside them; the notebooks show them."""
