"""Writes letters to Parquet files, each exactly once."""
