"""`pool_for_run`: which tasks stand between its setup and its teardown, in the DAG and as the scheduler reads it."""

from __future__ import annotations

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, TaskGroup, TriggerRule, task, task_group
from airflow.serialization.serialized_objects import DagSerialization

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.sensors import NodesSensor
from shoal.errors import InvalidArgumentError

SPEC = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


def train(task_id="train", pool_name="p", **kwargs) -> DistributedTrainOperator:
    return DistributedTrainOperator(task_id=task_id, spec=SPEC, pool_name=pool_name, **kwargs)


def mapped(specs, task_id="train", pool_name="p"):
    return DistributedTrainOperator.partial(task_id=task_id, pool_name=pool_name).expand(spec=specs)


@task
def specs() -> list:
    return [SPEC]


@task
def work(number=0):
    return number


@task.distributed(num_workers=1, pool_name="p")
def everywhere(number):
    return number


@task_group
def group(number):
    return work(everywhere(number))


def plain(outside):
    train("one") >> [train("two"), train("three")]


def expanded(outside):
    mapped(outside)


def expanded_over_values(outside):
    mapped([SPEC, SPEC])


def expanded_by_kwargs(outside):
    DistributedTrainOperator.partial(task_id="train", pool_name="p").expand_kwargs([{"spec": SPEC}, {"spec": SPEC}])


def expanded_and_collected(outside):
    work(mapped(outside).output)


def decorated(outside):
    everywhere.expand(number=[1, 2])
    everywhere.partial().expand_kwargs([{"number": 1}])


def a_mapped_group(outside):
    group.expand(number=outside)


def nested_groups(outside):
    with TaskGroup("outer"):
        train("a")
        with TaskGroup("inner"):
            mapped(outside, "b") >> train("c")


def a_group_in_an_order(outside):
    with TaskGroup("first") as first:
        train()
    first >> group.expand(number=[1, 2])


def several_with_tasks_outside_as_upstream(outside):
    for name in "abc":
        train(name).set_upstream(outside.operator)


def loops_back_through_a_task_outside(outside):
    train("a") >> outside.operator.dag.get_task("beside") >> train("b")


def ends_early_on_a_rule(outside):
    [train("a"), train("b")] >> EmptyOperator(task_id="c", trigger_rule="one_done")


def a_setup_and_teardown_of_its_own(outside):
    with EmptyOperator(task_id="undo").as_teardown(setups=EmptyOperator(task_id="do")):
        train()


BLOCKS = [
    plain,
    expanded,
    expanded_over_values,
    expanded_by_kwargs,
    expanded_and_collected,
    decorated,
    a_mapped_group,
    nested_groups,
    a_group_in_an_order,
    several_with_tasks_outside_as_upstream,
    loops_back_through_a_task_outside,
    ends_early_on_a_rule,
    a_setup_and_teardown_of_its_own,
]


def as_scheduled(dag):
    """The DAG as the scheduler reads it from the database."""
    return DagSerialization.from_dict(DagSerialization.to_dict(dag))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("where", ["dag", "group"])
def test_all_tasks_of_the_block_run_between_setup_and_teardown(block, where):
    with DAG("a_dag", schedule=None) as dag:
        outside = specs()
        EmptyOperator(task_id="beside")
        before = {*dag.task_dict}
        if where == "dag":
            with pool_for_run(size=2, pool_name="p") as pool:
                block(outside)
        else:
            with TaskGroup("g"), pool_for_run(size=2, pool_name="p") as pool:
                block(outside)
        setup, teardown = pool.setup.task_id, pool.teardown.task_id
        created = {*dag.task_dict} - before - {setup, teardown}
        outside >> pool.setup
        pool.teardown >> EmptyOperator(task_id="afterwards")
    assert created
    for each in (dag, as_scheduled(dag)):
        each.check_cycle() if each is dag else None
        assert each.get_task(setup).is_setup and each.get_task(teardown).is_teardown
        assert each.get_task(teardown).trigger_rule == TriggerRule.ALL_DONE_SETUP_SUCCESS
        for task_id in created:
            one = each.get_task(task_id)
            assert setup in {found.task_id for found in one.get_flat_relatives(upstream=True)}, task_id
            if not one.is_teardown:  # the scheduler holds back whatever has a setup that has not succeeded
                assert setup in {found.task_id for found in one.get_upstreams_only_setups()}, task_id
            if not one.is_setup:
                assert task_id in each.get_task(teardown).upstream_task_ids
        assert each.get_task("beside").upstream_task_ids <= created
        assert each.get_task(setup).upstream_task_ids == {"specs"}
        assert each.get_task("afterwards").upstream_task_ids == {teardown}


def test_what_the_user_ordered_by_hand_stays():
    with DAG("a_dag", schedule=None) as dag, pool_for_run(size=2, pool_name="p") as pool:
        prepared = specs()
        prepared >> pool.setup >> train() >> pool.teardown >> EmptyOperator(task_id="tell")
        EmptyOperator(task_id="after_all").set_upstream(dag.get_task("tell"))
    assert prepared.operator.upstream_task_ids == set()
    assert pool.setup.upstream_task_ids == {"specs"}
    assert pool.setup.downstream_task_ids == {"train", "clean_up_pool"}
    assert pool.teardown.upstream_task_ids == {"lease_pool", "train"}
    assert dag.get_task("after_all").upstream_task_ids == {"tell"}
    dag.check_cycle()


def test_a_failed_teardown_fails_no_run_and_a_failed_training_does():
    """A run's state is that of its last tasks; Airflow does not count a teardown among them."""
    with DAG("a_dag", schedule=None) as dag, pool_for_run(size=2, pool_name="p") as pool:
        mapped([SPEC])
    assert not as_scheduled(dag).get_task("clean_up_pool").on_failure_fail_dagrun
    assert pool.teardown.downstream_task_ids == set()


def test_blocks_side_by_side_have_tasks_and_leases_of_their_own():
    with DAG("a_dag", schedule=None) as dag:
        with pool_for_run(size=2, pool_name="p") as first:
            mapped([SPEC], "train")
        with pool_for_run(size=1, pool_name="p", prefix="score") as second:
            mapped([SPEC], "score")
            NodesSensor(task_id="nodes", expected_nodes=1, pool_name="p")
        with TaskGroup("g"), pool_for_run(size=1, pool_name="q") as third:
            train()
        first.teardown >> second.setup
    scheduled = as_scheduled(dag)
    assert scheduled.get_task("clean_up_pool").upstream_task_ids == {"lease_pool", "train"}
    assert scheduled.get_task("score_clean_up_pool").upstream_task_ids == {"score_lease_pool", "score", "nodes"}
    assert scheduled.get_task("g.clean_up_pool").upstream_task_ids == {"g.lease_pool", "g.train"}
    assert first.setup.lease == first.teardown.lease == "lease_pool"
    assert second.setup.lease == second.teardown.lease == "score_lease_pool"
    assert third.setup.lease == third.teardown.lease == "g.lease_pool"
    assert dag.get_task("train").partial_kwargs["lease"] == "lease_pool"
    assert dag.get_task("score").partial_kwargs["lease"] == dag.get_task("nodes").lease == "score_lease_pool"
    assert dag.get_task("g.train").lease == "g.lease_pool"


def test_nested_blocks_hold_both_pools_and_each_training_belongs_to_its_own():
    with DAG("a_dag", schedule=None) as dag, pool_for_run(size=2, pool_name="local://cpus?max_nodes=2") as outer:
        with pool_for_run(size=1, pool_name="gpus", prefix="gpu") as inner:
            on_cpus, on_gpus = train("on_cpus", "cpus"), mapped([SPEC], "on_gpus", "gpus")
        train("later", "cpus")
    scheduled = as_scheduled(dag)
    assert scheduled.get_task("gpu_lease_pool").upstream_task_ids == {"lease_pool"}
    assert scheduled.get_task("gpu_clean_up_pool").upstream_task_ids == {"gpu_lease_pool", "on_cpus", "on_gpus"}
    inside = {"gpu_clean_up_pool", "on_cpus", "on_gpus", "later", "lease_pool"}
    assert scheduled.get_task("clean_up_pool").upstream_task_ids == inside
    assert on_cpus.lease == outer.setup.lease == "lease_pool"
    assert on_gpus.partial_kwargs["lease"] == inner.setup.lease == "gpu_lease_pool"


def test_airflows_own_setup_and_teardown_stand_around_a_block():
    with (
        DAG("a_dag", schedule=None),
        EmptyOperator(task_id="undo").as_teardown(setups=EmptyOperator(task_id="do")),
        pool_for_run(size=2, pool_name="p") as pool,
    ):
        mapped([SPEC])
    assert "do" in pool.setup.upstream_task_ids
    assert "undo" in pool.teardown.downstream_task_ids


def test_a_block_in_a_mapped_group_is_refused():
    @task_group
    def each(size):
        with pool_for_run(size=2, pool_name="p"):
            work(size) >> train()

    with DAG("a_dag", schedule=None), pytest.raises(InvalidArgumentError, match="put the task group inside the block"):
        each.expand(size=[1, 2])


def test_arguments_of_tasks_reach_setup_and_teardown():
    given = {
        "retries": 3,
        "queue": "big",
        "pool": "slots",
        "priority_weight": 7,
        "executor_config": {"cpu": 1},
        "doc_md": "why",
        "owner": "ml",
    }
    with DAG("a_dag", schedule=None, default_args={"retries": 1}) as dag, pool_for_run(size=2, pool_name="p", **given):
        train()
    for task_id in ("lease_pool", "clean_up_pool"):
        one = as_scheduled(dag).get_task(task_id)
        assert {name: getattr(one, name) for name in given} == given
    assert dag.get_task("train").retries == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"retires": 3}, 'unknown argument "retires" of pool_for_run: did you mean retries'),
        ({"pool_nam": "p"}, "did you mean pool_name"),
        ({"task_id": "lease"}, "does not take task_id: use prefix="),
        ({"trigger_rule": "all_done"}, "does not take trigger_rule: Airflow decides"),
        ({"pool": "local://p"}, "one of Airflow's own pools of slots: use pool_name="),
        ({"prefix": ""}, "prefix='' is not legal"),
    ],
)
def test_wrong_arguments_are_refused(given, says):
    with (
        DAG("a_dag", schedule=None) as dag,
        pytest.raises(InvalidArgumentError, match=says),
        pool_for_run(size=2, **given),
    ):
        pass
    assert dag.tasks == []


def test_a_second_block_without_a_prefix_is_refused():
    with DAG("a_dag", schedule=None):
        with pool_for_run(size=2, pool_name="p"):
            pass
        with pytest.raises(InvalidArgumentError, match=r"lease_pool.*its own prefix"), pool_for_run(size=2):
            pass


def test_outside_of_a_dag_it_is_refused():
    with pytest.raises(InvalidArgumentError, match="outside of a DAG"), pool_for_run(size=2):
        pass


@pytest.mark.parametrize("rule", ["always", "one_success", "one_failed", "all_failed"])
def test_a_rule_that_does_not_wait_for_the_lease_is_refused(rule):
    with (
        DAG("a_dag", schedule=None),
        pytest.raises(InvalidArgumentError, match=rf'"train".*{rule}.*does not wait for lease_pool: use "all_success"'),
        pool_for_run(size=2, pool_name="p"),
    ):
        train(trigger_rule=rule)


@pytest.mark.parametrize("rule", ["one_success", "one_failed", "one_done"])
def test_a_rule_that_an_upstream_outside_can_fulfil_before_the_lease_is_refused(rule):
    with DAG("a_dag", schedule=None):
        before = EmptyOperator(task_id="before")
        with (
            pytest.raises(InvalidArgumentError, match=rf'"c".*{rule}.*does not wait for lease_pool: use "all_success"'),
            pool_for_run(size=2, pool_name="p"),
        ):
            [train("a"), before] >> EmptyOperator(task_id="c", trigger_rule=rule)


def test_a_rule_that_an_upstream_outside_can_fulfil_after_the_lease_is_legal():
    with DAG("a_dag", schedule=None) as dag:
        before, beside = EmptyOperator(task_id="before"), EmptyOperator(task_id="beside")
        with pool_for_run(size=2, pool_name="p"):
            first = train("a")
            first >> beside
            [first, beside] >> EmptyOperator(task_id="c", trigger_rule="one_done")
            [first, before] >> EmptyOperator(task_id="d", trigger_rule="all_done")

    assert dag.get_task("c").upstream_task_ids == {"a", "beside"}


def test_an_error_in_a_block_is_what_is_reported():
    with DAG("a_dag", schedule=None), pytest.raises(ZeroDivisionError), pool_for_run(size=2, pool_name="p"):
        raise ZeroDivisionError
