"""Letters as Arrow and Parquet."""
