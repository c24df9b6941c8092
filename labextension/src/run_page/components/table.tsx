interface Props {
  readonly title: string;
  readonly rows: readonly (readonly [name: string, value: string])[];
  /** Text beside the title. */
  readonly note?: string;
}

/** A titled table of names and values; not drawn without rows. */
export function Table({ title, rows, note = "" }: Props) {
  if (rows.length === 0) return null;
  return (
    <section aria-label={title.toLowerCase()}>
      <h3>
        {title} {note && <small>{note}</small>}
      </h3>
      <table>
        <tbody>
          {rows.map(([name, value]) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              <td>{value}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
