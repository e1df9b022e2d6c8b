from tests.pipelines.conftest import home as home
from tests.pipelines.conftest import migrated_home as migrated_home
from tests.pipelines.conftest import no_servers_of_the_user as no_servers_of_the_user
from tests.pipelines.conftest import prefect_home as prefect_home
