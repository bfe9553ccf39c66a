"""Dead letters into a lake: a structured streaming job over exported files.

python stream_letters.py letters lake            # what is new in the files, then end
python stream_letters.py letters lake --follow   # go on until Ctrl-C
"""

import argparse

from celery_dlq.spark.session import local_session


def start(spark, letters, lake, *, follow=False):
    """Start the query; its checkpoint beside the lake is what makes each letter be there once."""
    # A file of an older version may lack columns: the export writes down those of all files. The
    # names of folders have two more.
    schema = spark.read.parquet(f"{letters}/_celery_dlq/schema").schema
    schema = schema.add("dlq", "string").add("day", "date")
    # Spark ignores files a week older than the newest one, such as those of a copied folder.
    files = spark.readStream.option("maxFileAge", "3650d")
    new = files.schema(schema).parquet(letters)
    trigger = {"processingTime": "10 seconds"} if follow else {"availableNow": True}
    return (
        new.writeStream.format("parquet")
        .partitionBy("dlq", "day")
        .option("path", f"{lake}/letters")
        .option("checkpointLocation", f"{lake}/checkpoint")
        .trigger(**trigger)
        .start()
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("letters")
    parser.add_argument("lake")
    parser.add_argument("--follow", action="store_true")
    options = parser.parse_args()
    spark = local_session("dead letters")
    start(spark, options.letters, options.lake, follow=options.follow).awaitTermination()
    stored = spark.read.parquet(f"{options.lake}/letters")
    stored.groupBy("task_name", "reason").count().orderBy("task_name", "reason").show()
    print(f"letters in the lake: {stored.count()}")
    spark.stop()


if __name__ == "__main__":
    main()
