"""Dead letters into a lake: a structured streaming job from Redis to Parquet.

python stream_letters.py lake            # what is there and not yet in the lake, then end
python stream_letters.py lake --follow   # go on until Ctrl-C
"""

import argparse
import os

from celery_dlq.spark.session import local_session
from celery_dlq.spark.source import register

REDIS = os.environ.get("SHOP_REDIS", "redis://localhost:6379/0")


def start(spark, redis_url, lake, *, follow=False):
    """Start the query; its checkpoint beside the files is what makes each letter be there once."""
    register(spark)
    letters = spark.readStream.format("celery_dlq").option("url", redis_url).load()
    day = letters.selectExpr("*", "date(dead_lettered_at) AS day")
    trigger = {"processingTime": "10 seconds"} if follow else {"availableNow": True}
    return (
        day.writeStream.format("parquet")
        .partitionBy("dead_letter_queue", "day")
        .option("path", f"{lake}/letters")
        .option("checkpointLocation", f"{lake}/checkpoint")
        .trigger(**trigger)
        .start()
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("lake")
    parser.add_argument("--follow", action="store_true")
    options = parser.parse_args()
    spark = local_session("dead letters")
    start(spark, REDIS, options.lake, follow=options.follow).awaitTermination()
    stored = spark.read.parquet(f"{options.lake}/letters")
    stored.groupBy("task_name", "reason").count().orderBy("task_name", "reason").show()
    print(f"letters in the lake: {stored.count()}")
    spark.stop()


if __name__ == "__main__":
    main()
