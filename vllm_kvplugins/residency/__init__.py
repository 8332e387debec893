"""What is resident of each request: the plan, the page tables, the compaction."""
