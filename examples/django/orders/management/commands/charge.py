"""``python manage.py charge ID…``: publish the task and wait for its end."""

from django.core.management import BaseCommand

from orders.tasks import charge


class Command(BaseCommand):
    """Charges orders."""

    help = "Charge orders by their ids."

    def add_arguments(self, parser):
        parser.add_argument("order_id", nargs="+", type=int)

    def handle(self, *args, order_id, **options):
        for one, result in [(one, charge.delay(one)) for one in order_id]:
            result.get(propagate=False, timeout=60)
            self.stdout.write(f"order {one}: {result.state}")
